"""The purgatory's experiment: schedule, messages, designs, driver."""
