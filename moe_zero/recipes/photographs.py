"""The default data: the photographs that scikit-image ships, captioned.

Each entry is ``file: (training captions, held-out captions)``. The held-out wordings are never trained on: they
say what the picture shows in other words than the training captions do, and retrieval is measured with them.
Left out on purpose are the drawings (chessboard, phantom, colour wheel, horse, logo), which are no photographs,
and near duplicates (the right half of the motorcycle's stereo pair, the retina's microaneurysms).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

CAPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "astronaut.png": (
        (
            "a portrait of a smiling astronaut in an orange space suit",
            "a woman in a pressure suit sits in front of the american flag",
            "an astronaut with her white helmet, a model of the space shuttle behind her",
            "official photograph of a female crew member before her flight",
            "a woman with short hair wearing an orange flight suit",
        ),
        ("a nasa astronaut smiles at the camera in her spacesuit", "woman in an orange suit beside a flag"),
    ),
    "brick.png": (
        (
            "a wall of bricks with pale mortar between them",
            "rows of bricks seen in perspective",
            "close view of brickwork, the joints form a regular grid",
            "grey bricks laid in straight courses",
            "a paved surface made of long narrow bricks",
        ),
        ("a brick wall", "regular masonry, bricks and mortar joints"),
    ),
    "camera.png": (
        (
            "a man in a dark coat looks through a camera on a tripod",
            "black and white picture of a cameraman at work on a lawn",
            "a photographer films outdoors, tall buildings far behind him",
            "a man bends over a film camera standing on three legs",
            "side view of a photographer in a long black coat",
        ),
        ("a cameraman with his tripod in a park", "someone taking pictures in a field with a camera on a stand"),
    ),
    "cell.png": (
        (
            "a single bright cell under a microscope on a grey background",
            "a round glowing cell with a dark halo",
            "phase contrast image of one cell",
            "a small white disc seen through a microscope, biology",
            "a living cell photographed at high magnification",
        ),
        ("microscope picture of one round cell", "a bright biological cell on a plain grey field"),
    ),
    "chelsea.png": (
        (
            "a ginger tabby cat looks to the side",
            "close portrait of a cat with green eyes and long whiskers",
            "the face of a striped orange cat",
            "a pet cat with pink nose, resting",
            "a kitten with yellow fur gazes past the camera",
        ),
        ("a cat's face with whiskers", "an orange tabby pet with green eyes"),
    ),
    "clock_motion.png": (
        (
            "a wall clock blurred by the motion of the camera",
            "a white oval smeared sideways in front of a grey wall",
            "motion blur makes the dial of a clock unreadable",
            "out of focus picture of a round clock, everything streaked",
            "a shaky photograph of a clock hanging on a bare wall",
        ),
        ("a blurry clock on a wall", "a moving camera has smeared the clock face"),
    ),
    "coffee.png": (
        (
            "a cup of espresso on a red saucer",
            "coffee in a small cup with a metal spoon on a wooden table",
            "a fresh espresso seen from above, a spoon beside it",
            "a red and white cup filled with a hot drink",
            "a coffee break: cup, saucer and teaspoon on wood",
        ),
        ("an espresso cup and a spoon on a table", "hot coffee served in red china"),
    ),
    "coins.png": (
        (
            "rows of ancient coins on a dark background",
            "twenty-four old greek coins from pompeii",
            "a collection of antique silver coins laid out in a grid",
            "worn round coins with heads of rulers stamped on them",
            "a museum tray of numismatic finds",
        ),
        ("old coins arranged in four rows", "antique metal money in a collection"),
    ),
    "grass.png": (
        (
            "a patch of dry grass seen from above",
            "tangled blades of grass, texture",
            "thin stalks and leaves cover the ground",
            "a lawn in black and white, blades in all directions",
            "meadow grass photographed from close by",
        ),
        ("blades of grass", "a close look at a grassy lawn"),
    ),
    "gravel.png": (
        (
            "small stones cover the ground",
            "a bed of gravel, pebble next to pebble",
            "crushed rock seen from above, texture",
            "many rounded pebbles of the same size",
            "grey chips of stone on a path",
        ),
        ("pebbles and gravel", "a surface of little loose stones"),
    ),
    "hubble_deep_field.jpg": (
        (
            "thousands of distant galaxies seen by the hubble space telescope",
            "deep field image of the universe, spirals and specks of light on black",
            "far away galaxies of many colours in dark space",
            "an astronomical photograph of the early universe",
            "points of light and faint spiral galaxies in the night sky",
        ),
        ("galaxies in deep space", "a telescope's view of countless stars and galaxies"),
    ),
    "ihc.png": (
        (
            "stained tissue of the colon under a microscope",
            "immunohistochemistry slide, brown glands and blue nuclei",
            "histology section with brown staining",
            "a medical slide of glandular tissue coloured brown and blue",
            "pathology image of intestinal glands",
        ),
        ("a stained tissue section, brown and blue", "microscope slide of glands for pathology"),
    ),
    "moon.png": (
        (
            "craters on the surface of the moon",
            "grey lunar plain with small impact craters",
            "the moon's surface photographed by a spacecraft",
            "a round crater and dark hills on a dusty grey plain",
            "lunar landscape seen from orbit",
        ),
        ("moon craters seen from above", "the cratered ground of our satellite, the moon"),
    ),
    "motorcycle_left.png": (
        (
            "a red motorcycle parked in a garage",
            "a motorbike with chrome engine on a concrete floor",
            "side view of a yamaha motorcycle in front of shelves with boxes",
            "a red road bike on its stand in a workshop",
            "a two-wheeled vehicle with black seat and shiny exhaust",
        ),
        ("a motorbike standing in a garage", "red motorcycle in front of storage shelves"),
    ),
    "page.png": (
        (
            "a printed page of a manual about image segmentation",
            "a paragraph of english text, photographed under uneven light",
            "a page with the heading region-based segmentation",
            "printed documentation with a line of python code",
            "paper with typed sentences, the corner in shadow",
        ),
        ("a page of printed text with a heading", "a photographed sheet of paper with typed words"),
    ),
    "retina.jpg": (
        (
            "the back of a human eye with its blood vessels",
            "fundus photograph of a retina",
            "an orange disc crossed by thin red veins, with a bright optic nerve",
            "ophthalmology image of the inside of an eye",
            "retinal vessels spread from the optic disc",
        ),
        ("a retina with blood vessels", "eye fundus seen by an eye doctor"),
    ),
    "rocket.jpg": (
        (
            "a white rocket on its launch pad at dusk",
            "a falcon 9 stands ready between tall lattice towers",
            "a space launch vehicle lit by floodlights under a dark blue sky",
            "a rocket waits for lift-off at night",
            "spaceport with a slender rocket and four lightning masts",
        ),
        ("a rocket before launch in the evening", "launch site with a rocket and steel towers"),
    ),
    "text.png": (
        (
            "mathematical formulas written by hand on squared paper",
            "handwriting with integrals and fractions",
            "ink equations in a notebook, seen at an angle",
            "a sheet of handwritten mathematics",
            "scribbled calculus on checked paper",
        ),
        ("handwritten equations in a notebook", "maths notes in ink on lined paper"),
    ),
}

OBJECTS: dict[str, tuple[str, ...]] = {
    "astronaut.png": ("astronaut", "woman", "crew member"),
    "brick.png": ("brick", "bricks", "brickwork", "masonry"),
    "camera.png": ("cameraman", "photographer", "camera"),
    "cell.png": ("cell", "cells"),
    "chelsea.png": ("cat", "kitten"),
    "clock_motion.png": ("clock",),
    "coffee.png": ("coffee", "espresso", "cup"),
    "coins.png": ("coin", "coins", "money"),
    "grass.png": ("grass", "lawn", "grassy"),
    "gravel.png": ("gravel", "pebble", "pebbles", "stone", "stones", "crushed rock"),
    "hubble_deep_field.jpg": ("galaxy", "galaxies", "universe", "stars"),
    "ihc.png": ("tissue", "gland", "glands", "histology", "pathology", "immunohistochemistry"),
    "moon.png": ("moon", "lunar", "crater", "craters"),
    "motorcycle_left.png": ("motorcycle", "motorbike", "bike"),
    "page.png": ("page", "text", "paragraph", "paper", "documentation"),
    "retina.jpg": ("retina", "retinal", "eye", "fundus"),
    "rocket.jpg": ("rocket", "falcon", "launch vehicle"),
    "text.png": ("handwriting", "handwritten", "equations", "formulas", "mathematics", "maths", "calculus", "by hand"),
}
"""What a caption has to name, one of it, to be right about a photograph."""


def folder() -> Path:
    """The folder in which scikit-image keeps its pictures (the package itself is not imported).

    Raises:
        FileNotFoundError: scikit-image is not installed.
    """
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the default photographs come with scikit-image, which is not installed: pip install 'moe-zero[train]', "
            "or give your own pictures with --data captions.jsonl"
        )
    return Path(spec.submodule_search_locations[0]) / "data"
