"""purgatoryd: a host-level timer service on shared-memory timing wheels."""

__version__ = "0.1.0"
