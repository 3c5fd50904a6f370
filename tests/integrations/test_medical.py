"""DICOM and NIfTI: windows as told, frames, orientation, and overlays as secondary captures."""

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
        with pytest.raises(ImageError, match=r"text\.dcm is no DICOM"):
            read_dicom(tmp_path / "text.dcm")
        with pytest.raises(InputError, match="window"):
            read_dicom(scan(stored, tmp_path / "ct.dcm"), window=(40, 0))


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
        with pytest.raises(ImageError, match="4 axes"):
            read_nifti(tmp_path / "4d.nii")
        with pytest.raises(InputError, match="says no window"):
            read_nifti(_saved(volume, tmp_path), window="file")


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
        with pytest.raises(ImageError, match="no volume that can be read"):
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
