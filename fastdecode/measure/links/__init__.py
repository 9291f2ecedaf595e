"""How near streams of K and V come to what carries them, link by link."""
