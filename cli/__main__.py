"""`python -m purgatoryd.cli` is the same as `purgatoryd`."""

from purgatoryd.cli import main

main()
