"""Small DICOM files."""

from __future__ import annotations

import numpy as np
import pydicom
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid


def scan(pixels, file, **fields):
    """A CT file of stored values (rows, columns) or (frames, rows, columns), 16 bits signed."""
    dataset = pydicom.Dataset()
    dataset.SOPClassUID, dataset.SOPInstanceUID = CTImageStorage, generate_uid()
    dataset.PatientID, dataset.PatientName, dataset.StudyInstanceUID = "007", "Doe^Jane", generate_uid()
    dataset.SeriesInstanceUID = generate_uid()
    dataset.Rows, dataset.Columns = pixels.shape[-2:]
    if pixels.ndim == 3:
        dataset.NumberOfFrames = len(pixels)
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = 16, 16, 15, 1
    dataset.PixelData = pixels.astype(np.int16).tobytes()
    for name, value in fields.items():
        setattr(dataset, name, value)
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    dataset.save_as(file, enforce_file_format=True)
    return file
