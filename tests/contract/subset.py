"""Which tests a stage runs in `make test`."""


def is_chosen(stage, file, test):
    return True
