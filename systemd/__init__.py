"""systemd units and their user and folders, which `purgatoryd install` writes."""
