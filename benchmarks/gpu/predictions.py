"""Calculated from the compiled kernels (sm_90, nvcc 13.0) before any GPU had run them, to be seen beside it.

Shares are of the speed of a device-to-device copy, which was predicted as 3.0 TB/s on an H100 and 4.3 TB/s on an H200.
"""

PREDICTIONS: dict[str, dict[str, object]] = {
    "log8 bf16": {"H100 share": 0.95, "H200 share": 0.90, "range": [0.90, 1.0], "H100 ms at 1e9": 3.58},
    "log8 fp32": {"H100 share": 0.97, "H200 share": 0.95, "range": [0.94, 1.01], "H100 ms at 1e9": 5.56},
    "companded8 bf16": {"H100 share": 0.95, "H200 share": 0.90, "H100 ms at 1e9": 3.55},
    "log8 bf16+8": {"H100 share": 0.95, "H200 share": 0.90, "H100 ms at 1e9": 4.28},
    "dynamic8 bf16": {"H100 share": 0.80, "H200 share": 0.65, "range": [0.7, 0.9], "H100 ms at 1e9": 4.2},
    "rows of 130": {"H100 share": 0.85},
    "rows of 257": {"H100 share": 0.85},
    "rows of 33": {"H100 share": 0.75},
    "fp32 fp32": {"H100 share": 0.90, "H100 ms at 1e9": 10.4},
    "nadam log8 bf16": {"range": [0.25, 0.35], "H100 ms at 1e9": 11.5},
    "torch fused bf16": {"H100 share": 0.90, "H100 ms at 1e9": 5.2},
    "torch fused fp32": {"H100 share": 0.90, "H100 ms at 1e9": 10.4},
    "half of the rows": {"H100 share": 0.5},
    "norm": {"H100 ms at 1e9": 2.5},
}
