"""The parts of bench_purgatory.py: schedule, messages, designs, driver."""
