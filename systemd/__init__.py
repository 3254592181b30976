"""The systemd units, and the files for their user and folders, which `purgatoryd install`
writes."""
