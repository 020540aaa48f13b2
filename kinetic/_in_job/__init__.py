"""What functions call on their hosts: which slice they are on, and meshes over slices."""
