"""The shared bytes of purgatoryd: layout, C core, and the Python face of both."""
