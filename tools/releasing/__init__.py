"""The parts of tools/release.py: what is checked before a release (rules, rebuild, check), and how it is signed,
published and tried (signature, publish, smoke, dry_run)."""
