"""The parts of tools/release.py: checks before a release (rules, rebuild, check), and signing, publishing and testing
it (signature, publish, smoke, dry_run)."""
