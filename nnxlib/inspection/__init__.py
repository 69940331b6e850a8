"""What is in a model, to be looked at: tables, pictures, differences, statistics.

Each is imported when it is first asked for: ``nnx.tabulate`` imports ``tabulate.py``. Nothing else imports from here.
"""
