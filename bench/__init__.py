"""One script a claim: each prints reference, baseline and ours of one run. Run as `python -m bench.NAME`."""
