"""A plugin that brings its own part for each duty of the core. Imports no torch: code is named by strings."""

from mm_plugin import Modality, ModelSpec, hookimpl

heard = []


def digest_elsewhere(tensors):
    from duties.parts import digest_elsewhere

    return digest_elsewhere(tensors)


def make_shelf(capacity_bytes):
    from duties.parts import Shelf

    return Shelf(capacity_bytes)


@hookimpl
def mm_register_models():
    return ModelSpec(
        name="duties",
        output_version=1,
        architectures=("Duties",),
        modalities=(Modality.IMAGE,),
        placeholders={Modality.IMAGE: "<image>"},
        fields={Modality.IMAGE: ()},
        padding="duties.rules:pad",
        positions="duties.rules:positions",
        processor="duties.parts:Processor",
        encoder="duties.parts:Model",
        embed="duties.parts:embed",
    )


@hookimpl
def mm_register_digests():
    return {"xpu": digest_elsewhere}


@hookimpl
def mm_register_stores():
    return {"shelf": make_shelf}


@hookimpl
def mm_register_observers():
    return {"seen": heard.append}
