"""The tasks of the study, a module each, with a function ``task(size)``."""
