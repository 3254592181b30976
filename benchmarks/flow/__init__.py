"""The parts of bench_pipeline.py."""
