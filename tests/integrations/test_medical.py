"""DICOM and NIfTI: windows, frames, orientation, odd files, and overlays as secondary captures."""

import shutil
import subprocess
import warnings

import nibabel
import numpy as np
import pydicom
import pytest
import torch
from PIL import Image

import vitreous
from small_models import small_vit
from small_scans import scan
from vitreous.errors import ImageError, InputError
from vitreous.integrations.medical import read_dicom, read_nifti, read_volume, write_secondary_capture
from vitreous.models import Preprocessing


@pytest.fixture
def stored():
    return np.arange(-200, 824, dtype=np.int16).reshape(32, 32) * 4


def grey(picture):
    assert picture.mode == "RGB"
    values = np.asarray(picture)
    assert (values == values[..., :1]).all()
    return values[..., 0]


class TestDicom:
    def test_a_window_in_units_of_the_modality(self, stored, tmp_path):
        file = scan(stored, tmp_path / "ct.dcm", RescaleSlope=0.5, RescaleIntercept=-100)
        (found,) = read_dicom(file, window=(40, 400))
        hounsfield = stored * 0.5 - 100
        # PS3.3 C.11.2.1.2.1: the formula of the standard, its rounding within half a grey value.
        expected = ((hounsfield - 39.5) / 399 + 0.5).clip(0, 1) * 255
        assert np.abs(grey(found) - expected).max() <= 0.5

    def test_the_files_own_window(self, stored, tmp_path):
        file = scan(stored, tmp_path / "ct.dcm", WindowCenter=[100, 600], WindowWidth=[200, 50])
        (own,), (told,) = read_dicom(file), read_dicom(file, window=(100, 200))
        assert np.array_equal(grey(own), grey(told))
        expected = pydicom.pixels.apply_voi_lut(stored, pydicom.dcmread(file)).astype(float)
        expected = (expected - expected.min()) / np.ptp(expected) * 255
        assert np.abs(grey(own) - expected).max() <= 1  # pydicom gives 16 bits, rounded by itself

    def test_without_a_window_all_values_are_used(self, stored, tmp_path):
        (found,) = read_dicom(scan(stored, tmp_path / "ct.dcm"))
        assert (grey(found)[0, 0], grey(found)[-1, -1]) == (0, 255)

    def test_frames(self, stored, tmp_path):
        file = scan(np.stack([stored, stored // 2, -stored]), tmp_path / "multi.dcm")
        assert len(read_dicom(file)) == 3
        last, first = read_dicom(file, window=(0, 1000), frames=[-1, 0])
        (alone,) = read_dicom(scan(-stored, tmp_path / "one.dcm"), window=(0, 1000))
        assert np.array_equal(grey(last), grey(alone))
        assert not np.array_equal(grey(first), grey(alone))
        with pytest.raises(InputError, match="there are 3"):
            read_dicom(file, frames=[3])

    def test_frames_with_windows_of_their_own(self, stored, tmp_path):
        groups = []
        for centre, slope in ((0, 1), (100, 2)):
            group, voi, value = pydicom.Dataset(), pydicom.Dataset(), pydicom.Dataset()
            voi.WindowCenter, voi.WindowWidth = centre, 300
            value.RescaleSlope, value.RescaleIntercept = slope, 0
            group.FrameVOILUTSequence, group.PixelValueTransformationSequence = [voi], [value]
            groups.append(group)
        file = scan(np.stack([stored, stored]), tmp_path / "e.dcm", PerFrameFunctionalGroupsSequence=groups)
        first, second = read_dicom(file)
        assert np.array_equal(grey(first), grey(read_dicom(scan(stored, tmp_path / "a.dcm"), window=(0, 300))[0]))
        doubled = scan(stored * 2, tmp_path / "b.dcm")
        assert np.array_equal(grey(second), grey(read_dicom(doubled, window=(100, 300))[0]))

    def test_inverted_grey(self, stored, tmp_path):
        plain = scan(stored, tmp_path / "a.dcm")
        inverted = scan(stored, tmp_path / "b.dcm", PhotometricInterpretation="MONOCHROME1")
        assert np.array_equal(255 - grey(read_dicom(plain)[0]), grey(read_dicom(inverted)[0]))

    def test_what_cannot_be_read(self, stored, tmp_path):
        (tmp_path / "text.dcm").write_text("no image")
        with pytest.raises(ImageError, match=r"text\.dcm is not a DICOM file"):
            read_dicom(tmp_path / "text.dcm")
        with pytest.raises(ImageError, match=r"none\.dcm cannot be read .* No such file"):
            read_dicom(tmp_path / "none.dcm")
        content = scan(stored, tmp_path / "ct.dcm").read_bytes()
        (tmp_path / "cut.dcm").write_bytes(content[:-100])
        with pytest.raises(ImageError, match="less than expected"):
            read_dicom(tmp_path / "cut.dcm")

    @pytest.mark.parametrize("window", [(40, 0), (40, -1), (40, np.nan), (), (40,), ("40", "400"), "lung", None, 40])
    def test_invalid_windows(self, stored, tmp_path, window):
        with pytest.raises(InputError, match="window must be"):
            read_dicom(scan(stored, tmp_path / "ct.dcm"), window=window)

    @pytest.mark.parametrize("frames", [[], "0", [0.5], [1], [-2], 0])
    def test_invalid_frames(self, stored, tmp_path, frames):
        with pytest.raises(InputError, match="frame"):
            read_dicom(scan(stored, tmp_path / "ct.dcm"), frames=frames)

    @pytest.mark.parametrize(
        "fields",
        [
            {"WindowCenter": None, "WindowWidth": None},
            {"WindowCenter": 40},
            {"WindowCenter": 40, "WindowWidth": 0},
            {"WindowCenter": 40, "WindowWidth": None},
        ],
    )
    def test_a_window_without_values_is_none(self, stored, tmp_path, fields):
        plain, (found,) = (
            read_dicom(scan(stored, tmp_path / "a.dcm")),
            read_dicom(scan(stored, tmp_path / "b.dcm", **fields)),
        )
        assert np.array_equal(grey(found), grey(plain[0]))

    def test_signed_unsigned_and_unused_bits(self, tmp_path):
        """The same 12-bit values, stored in each way."""
        values = np.arange(1024, dtype=np.int16).reshape(32, 32) * 2
        files = [
            scan(values, tmp_path / "signed.dcm"),
            scan(values, tmp_path / "unsigned.dcm", PixelRepresentation=0),
            scan(values, tmp_path / "twelve.dcm", PixelRepresentation=0, BitsStored=12, HighBit=11),
            scan(values - 1024, tmp_path / "shifted.dcm", RescaleSlope=1, RescaleIntercept=1024),
        ]
        first, *others = (grey(read_dicom(file, window=(1000, 1500))[0]) for file in files)
        assert first.min() == 0
        assert first.max() == 255
        assert all(np.array_equal(first, other) for other in others)

    def test_a_slope_without_an_intercept(self, stored, tmp_path):
        (found,) = read_dicom(scan(stored, tmp_path / "a.dcm", RescaleSlope=2), window=(0, 1000))
        (expected,) = read_dicom(scan(stored * 2, tmp_path / "b.dcm"), window=(0, 1000))
        assert np.array_equal(grey(found), grey(expected))

    def test_values_that_are_not_finite(self, stored, tmp_path):
        dataset = pydicom.dcmread(scan(stored, tmp_path / "a.dcm"))
        values = stored.astype(np.float32)
        values[3, 4] = np.nan
        for keyword in ("PixelData", "BitsStored", "HighBit", "PixelRepresentation"):
            del dataset[keyword]
        dataset.BitsAllocated, dataset.FloatPixelData = 32, values.tobytes()
        dataset.save_as(tmp_path / "float.dcm")
        with pytest.raises(ImageError, match="not finite"):
            read_dicom(tmp_path / "float.dcm")

    def test_compressed_files(self, stored, tmp_path):
        dataset = pydicom.dcmread(scan(stored, tmp_path / "a.dcm"))
        dataset.compress(pydicom.uid.RLELossless)  # pydicom decompresses it by itself
        dataset.save_as(tmp_path / "rle.dcm")
        expected = grey(read_dicom(tmp_path / "a.dcm")[0])
        assert np.array_equal(grey(read_dicom(tmp_path / "rle.dcm")[0]), expected)
        dataset.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLSLossless  # needs a package that is not installed here
        dataset.save_as(tmp_path / "jls.dcm")
        with pytest.raises(ImageError, match=r"compressed \(JPEG-LS Lossless.* pip install \"pylibjpeg"):
            read_dicom(tmp_path / "jls.dcm")

    def test_palettes(self, tmp_path):
        dataset = pydicom.dcmread(scan(np.arange(256).reshape(16, 16), tmp_path / "a.dcm", PixelRepresentation=0))
        dataset.PhotometricInterpretation = "PALETTE COLOR"
        tables = {"Red": np.arange(256) * 257, "Green": np.arange(256)[::-1] * 257, "Blue": np.zeros(256)}
        for colour, table in tables.items():
            dataset.add_new(f"{colour}PaletteColorLookupTableDescriptor", "US", [256, 0, 16])
            dataset.add_new(f"{colour}PaletteColorLookupTableData", "OW", table.astype(np.uint16).tobytes())
        dataset.save_as(tmp_path / "palette.dcm")
        found = np.asarray(read_dicom(tmp_path / "palette.dcm")[0])
        assert np.array_equal(found.reshape(256, 3), np.stack([np.arange(256), np.arange(256)[::-1], np.zeros(256)], 1))


class TestNifti:
    @pytest.fixture
    def volume(self):
        return np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)

    def test_slices_are_upright(self, volume, tmp_path):
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / "v.nii.gz")
        found = read_nifti(tmp_path / "v.nii.gz", slices=[2])
        assert found[0].size == (4, 5)
        values = volume / volume.max() * 255
        # Anterior, the largest y, is at the top; x grows to the right. Rounded to whole grey values.
        assert np.abs(grey(found[0]) - values[:, ::-1, 2].T).max() <= 0.5
        flipped = read_nifti(tmp_path / "v.nii.gz", slices=[2], radiological=True)[0]
        assert np.array_equal(grey(flipped), grey(found[0])[:, ::-1])
        assert [picture.size for picture in read_nifti(tmp_path / "v.nii.gz", axis=0)] == [(5, 6)] * 4

    def test_the_direction_of_storage_does_not_matter(self, volume, tmp_path):
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / "ras.nii")
        nibabel.save(nibabel.Nifti1Image(volume[::-1, ::-1], np.diag([-1.0, -1, 1, 1])), tmp_path / "lps.nii")
        one, other = (read_nifti(tmp_path / name) for name in ("ras.nii", "lps.nii"))
        assert all(np.array_equal(grey(a), grey(b)) for a, b in zip(one, other, strict=True))

    def test_a_window(self, volume, tmp_path):
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / "v.nii")
        (found,) = read_nifti(tmp_path / "v.nii", window=(60, 20), slices=[3])
        expected = ((volume[:, ::-1, 3].T - 50) / 20).clip(0, 1) * 255
        assert np.abs(grey(found) - expected).max() <= 0.5

    def test_what_cannot_be_read(self, volume, tmp_path):
        nibabel.save(nibabel.Nifti1Image(np.stack([volume] * 2, axis=-1), np.eye(4)), tmp_path / "4d.nii")
        with pytest.raises(ImageError, match=r"shape \(4, 5, 6, 2\): give one 3-D volume"):
            read_nifti(tmp_path / "4d.nii")
        with pytest.raises(InputError, match="have no window"):
            read_nifti(_saved(volume, tmp_path), window="file")
        with pytest.raises(InputError, match="no slice 9: there are 6"):
            read_nifti(_saved(volume, tmp_path), slices=[9])
        with pytest.raises(InputError, match="axis must be 2"):
            read_nifti(_saved(volume[..., 0], tmp_path), axis=0)
        with pytest.raises(ImageError, match="real numbers"), warnings.catch_warnings(action="error"):
            read_nifti(_saved(volume.astype(np.complex64), tmp_path))
        with pytest.raises(ImageError, match=r"shape \(0, 5, 6\)"):
            read_nifti(_saved(volume[:0], tmp_path))
        volume[1, 2, 3] = np.nan
        with pytest.raises(ImageError, match="not finite"):
            read_nifti(_saved(volume, tmp_path))
        (tmp_path / "junk.nii.gz").write_bytes(b"junk")
        with pytest.raises(ImageError, match="not a gzip file"):
            read_nifti(tmp_path / "junk.nii.gz")

    def test_one_volume_with_a_fourth_axis_and_scaled_integers(self, volume, tmp_path):
        expected = read_nifti(_saved(volume, tmp_path))
        found = read_nifti(_saved(volume[..., None], tmp_path))
        assert all(np.array_equal(grey(a), grey(b)) for a, b in zip(found, expected, strict=True))
        image = nibabel.Nifti1Image((volume * 2).astype(np.int16), np.eye(4))
        image.header.set_slope_inter(0.5, 0)
        nibabel.save(image, tmp_path / "scaled.nii")
        scaled = read_nifti(tmp_path / "scaled.nii")
        assert all(np.array_equal(grey(a), grey(b)) for a, b in zip(scaled, expected, strict=True))


def _saved(volume, folder):
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), folder / "v.nii")
    return folder / "v.nii"


class TestVolumes:
    """What a model of volumes is given."""

    def test_nifti_has_the_axes_of_its_orientation(self, tmp_path):
        values = np.arange(24.0).reshape(2, 3, 4)
        file = tmp_path / "flipped.nii.gz"
        nibabel.save(nibabel.Nifti1Image(values, np.diag([-1.0, 1.0, 1.0, 1.0])), file)  # stored from right to left
        found = read_volume(file)
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found[0, 0], values[::-1])
        np.testing.assert_array_equal(read_volume(file, axes="zyx")[0, 0], values[::-1].transpose(2, 1, 0))

    def test_frames_of_dicom_are_in_units_of_the_modality(self, tmp_path):
        stored = np.arange(60).reshape(3, 4, 5)
        file = scan(stored, tmp_path / "frames.dcm", RescaleSlope=2, RescaleIntercept=-1000)
        np.testing.assert_array_equal(read_volume(file)[0, 0], 2 * stored - 1000)
        # 40 Hounsfield units wide around -960: from -980 to -940 is 0 to 1.
        windowed = read_volume(file, window=(-960, 40))[0, 0].numpy()
        np.testing.assert_allclose(windowed, np.clip((2 * stored - 20) / 40, 0, 1), atol=1e-6)  # float32

    def test_ranges_and_sizes(self, tmp_path):
        file = scan(np.arange(60).reshape(3, 4, 5), tmp_path / "frames.dcm")
        found = read_volume(file, window="range", size=(6, 8, 10))
        assert found.shape == (1, 1, 6, 8, 10)
        assert float(found.min()) == 0
        assert float(found.max()) == 1

    def test_what_is_no_volume(self, tmp_path):
        file = scan(np.arange(60).reshape(3, 4, 5), tmp_path / "frames.dcm")
        for options in ({"window": "file"}, {"size": (4, 4)}, {"axes": "yxz"}, {"window": (0, -1)}):
            with pytest.raises(InputError):
                read_volume(file, **options)
        with pytest.raises(ImageError, match="cannot be read as a volume"):
            read_volume(tmp_path / "missing.nii.gz")


class TestSecondaryCapture:
    def test_the_overlay_of_an_explained_scan(self, stored, tmp_path):
        file = scan(stored, tmp_path / "ct.dcm", StudyDescription="Thorax")
        seen = Preprocessing(image_size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
        pictures = read_dicom(file, window=(40, 400))
        explanation = vitreous.explain((small_vit(depth=2, dtype=torch.float32), seen), pictures, "gae")
        overlay = explanation.overlay("gae", photo=pictures[0])
        written = write_secondary_capture(overlay, tmp_path / "out" / "overlay.dcm", source=file)
        found, source = pydicom.dcmread(written), pydicom.dcmread(file)
        assert np.array_equal(found.pixel_array, np.asarray(overlay))
        assert found.PatientName == "Doe^Jane"
        assert found.StudyInstanceUID == source.StudyInstanceUID
        assert found.SeriesInstanceUID != source.SeriesInstanceUID
        assert found.SourceImageSequence[0].ReferencedSOPInstanceUID == source.SOPInstanceUID
        assert list(found.ImageType) == ["DERIVED", "SECONDARY"]
        assert found.SOPClassUID.name == "Secondary Capture Image Storage"
        assert "not for diagnosis" in found.DerivationDescription
        (again,) = read_dicom(written)
        assert np.array_equal(np.asarray(again), np.asarray(overlay))

    def test_frames_and_no_source(self, tmp_path):
        pictures = [Image.new("RGB", (5, 3), colour) for colour in ("red", "green")]
        written = write_secondary_capture(pictures, tmp_path / "frames.dcm")
        found = read_dicom(written)
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(found, pictures, strict=True))
        with pytest.raises(InputError, match="one size"):
            write_secondary_capture([pictures[0], Image.new("RGB", (4, 4))], tmp_path / "x.dcm")

    @pytest.mark.parametrize(("character_set", "name"), [("ISO_IR 192", "Müller^Jürgen"), ("ISO_IR 100", "Muñoz^José")])
    def test_names_in_other_character_sets(self, stored, tmp_path, character_set, name):
        file = scan(stored, tmp_path / "ct.dcm", SpecificCharacterSet=character_set, PatientName=name)
        for source in (file, pydicom.dcmread(file)):
            written = write_secondary_capture(Image.new("RGB", (5, 3)), tmp_path / "out.dcm", source=source)
            assert pydicom.dcmread(written).PatientName == name

    def test_what_the_source_says_of_its_pixels_is_kept(self, stored, tmp_path):
        picture = Image.new("RGB", (5, 3))
        plain = pydicom.dcmread(write_secondary_capture(picture, tmp_path / "a.dcm"))
        assert plain.BurnedInAnnotation == "YES"  # nothing is known of the pixels
        source = scan(stored, tmp_path / "ct.dcm", BurnedInAnnotation="NO", LossyImageCompression="01")
        derived = pydicom.dcmread(write_secondary_capture(picture, tmp_path / "b.dcm", source=source))
        assert (derived.BurnedInAnnotation, derived.LossyImageCompression) == ("NO", "01")
        with pytest.raises(ImageError, match="cannot be read"):
            write_secondary_capture(picture, tmp_path / "c.dcm", source=tmp_path / "none.dcm")

    @pytest.mark.skipif(shutil.which("dciodvfy") is None, reason="dicom3tools is not installed")
    @pytest.mark.parametrize("frames", [1, 3])
    @pytest.mark.parametrize("with_source", [True, False])
    def test_dciodvfy_finds_no_error(self, stored, tmp_path, frames, with_source):
        source = scan(stored, tmp_path / "ct.dcm") if with_source else None
        pictures = [Image.new("RGB", (5, 3))] * frames
        written = write_secondary_capture(pictures, tmp_path / "out.dcm", source=source)
        result = subprocess.run(["dciodvfy", written], capture_output=True, text=True, check=False)
        assert "Error" not in result.stderr + result.stdout
        assert ("MultiframeTrueColorSCImage" if frames > 1 else "SCImage") in result.stderr
