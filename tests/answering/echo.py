"""Answers each request with itself, and dies at `die`."""

import os

from minfer.process.remote import serve

serve(lambda request, say: os._exit(3) if "die" in request else (say(phase="echoing"), request)[1])
