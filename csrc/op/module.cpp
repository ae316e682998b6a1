// op/module.cpp: the Python module _C. What this build is; needs no torch, so it can be asked before torch is loaded.
#include <pybind11/pybind11.h>

#include "build_info.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "What this build of flash_attn_ext is.";
  m.def(
      "build_info",
      [] {
        py::dict info;
        info["version"] = flash::build::kVersion;
        info["torch"] = flash::build::kTorch;
        info["cuda"] = flash::build::kCuda;
        info["archs"] = flash::build::kArchs;
        info["compiler"] = flash::build::kCompiler;
        info["commit"] = flash::build::kCommit;
        return info;
      },
      "version, torch (that it was built for), cuda (of nvcc; '' = CPU only), archs, compiler, commit ('' = not from a clone): "
      "all str.");
}
