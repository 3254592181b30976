"""Parts of bench_purgatory.py: schedule, messages, designs, driver."""
