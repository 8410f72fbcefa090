"""``python -m selfnorm``: the command line."""

from selfnorm.cli import main

if __name__ == "__main__":
    main()
