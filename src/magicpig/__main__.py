"""`python -m magicpig` is `magicpig`."""

from magicpig.cli import main

if __name__ == "__main__":
    main()
