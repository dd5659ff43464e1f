"""Who runs the stages: this process (`simulation`), roles as processes (`services`), Flower (`flower`)."""
