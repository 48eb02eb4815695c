"""One step: inputs described and checked, kernel tables made and cached, devices and phases run."""
