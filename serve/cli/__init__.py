"""The `jaxspec` command; a module each subcommand."""
