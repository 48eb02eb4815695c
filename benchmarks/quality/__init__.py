"""Training quality of optimizers with quantized state, paired over seeds: run.py trains, report.py makes tables."""
