"""The parts of bench_peers.py: servers, clients' work, scenes, verdicts, report."""
