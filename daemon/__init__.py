"""The reaper daemon: its loop, its commands, its lifecycle; `listeners` has its sockets."""
