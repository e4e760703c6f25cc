"""Never answers, and keeps a processor busy."""

from minfer.process.remote import serve


def answer(request, say):
    while True:
        pass


serve(answer)
