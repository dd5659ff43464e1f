"""What both services share: server, application, limits, client."""
