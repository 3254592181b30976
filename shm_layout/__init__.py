"""The shared memory of purgatoryd: its layout, the C core, and the Python classes over both."""
