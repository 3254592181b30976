"""The flights of a real year: a departure arms a timer, the landing cancels it."""
