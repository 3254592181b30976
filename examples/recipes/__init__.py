"""Recipes: small programs for common tasks, whose results stay right if a process is killed.

Each module starts with its explanation and runs by itself against a daemon.
"""
