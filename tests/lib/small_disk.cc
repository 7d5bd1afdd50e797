// See small_disk.h.
#include "tests/lib/small_disk.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

namespace gradwire::testing_support {

SmallDisk::SmallDisk() : path_(testing::TempDir() + "/gradwire-small-disk-" + std::to_string(getpid())) {
  mkdir(path_.c_str(), 0755);
  mounted_ = mount("tmpfs", path_.c_str(), "tmpfs", 0, "size=1m") == 0;
}

SmallDisk::~SmallDisk() {
  if (mounted_) umount(path_.c_str());
  rmdir(path_.c_str());
}

void SmallDisk::Fill() {
  std::FILE* file = std::fopen((path_ + "/ballast").c_str(), "w");
  const std::string block(4096, 'x');
  while (std::fwrite(block.data(), 1, block.size(), file) == block.size() && std::fflush(file) == 0) {
  }
  std::fclose(file);
}

void SmallDisk::Free() { std::remove((path_ + "/ballast").c_str()); }

}  // namespace gradwire::testing_support
