"""``python -m flintc`` is the command ``flintc``."""

from flintc.cli import main

if __name__ == "__main__":
    main()
