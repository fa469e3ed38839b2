"""One script a claim: each prints reference, baseline and ours of one run. Run as `python -m bench.NAME`."""

import os

# Read when the libraries are first imported: onnxruntime would start a thread that dials out, OpenBLAS one a core.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
