"""The parts of tools/release.py: the checks before a release (rules, rebuild, check), and its signing, publication and
trial (signature, publish, smoke, dry_run)."""
