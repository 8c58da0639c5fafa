"""The parts of tools/build.py: toolchain (finds compilers), plan (reads build.toml), compile, layout, abi."""
