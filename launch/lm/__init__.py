"""The training job behind ``launch/train.py``: a byte-level language model."""
