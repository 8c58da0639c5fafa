"""The parts of tools/release.py: what is checked before a release (api, layers, sources, variants, rebuild), and how it
is published and tried (publish, smoke, dry_run)."""
