"""prefork-serve: a pre-fork inference server for ONNX models, one prepared model in shared memory for N workers."""

__version__ = "0.1.0"
