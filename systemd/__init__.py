"""Units for systemd, and what makes their user and folders; `purgatoryd install` writes them."""
