"""Control-plane plugs: frames to addresses. Import the one you use; none is loaded here."""
