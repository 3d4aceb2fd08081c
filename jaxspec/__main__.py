"""`python -m jaxspec`: the `jaxspec` command."""

from jaxspec.serve.cli.app import main

if __name__ == "__main__":
    main()
