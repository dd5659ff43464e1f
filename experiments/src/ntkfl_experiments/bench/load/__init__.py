"""The two services under load: many clients in a second process, some of them hostile, and what it costs."""
