"""The reaper daemon: its loop, its commands, its notices, its lifecycle."""
