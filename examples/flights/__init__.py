"""An example with the flights of a real year: a departure arms a timer, and the landing cancels
it."""
