"""Drive one core on one link, on asyncio: frames in, frames out. Internal."""
