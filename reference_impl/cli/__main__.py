"""Where nothing is installed: python -m reference_impl.cli profile"""

from reference_impl.cli import app

if __name__ == "__main__":
    app()
