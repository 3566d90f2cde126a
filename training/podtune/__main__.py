"""Where the ``podtune`` command begins."""

from podtune.cli import main

if __name__ == "__main__":
    main()
