// A disk of 1 MiB that can be filled and emptied: a tmpfs, which takes root.
#pragma once

#include <string>

namespace gradwire::testing_support {

// Not thread-safe. Gone, with what is on it, when this is destroyed.
class SmallDisk {
 public:
  SmallDisk();
  ~SmallDisk();
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  bool mounted() const { return mounted_; }  // false: this may not mount anything here
  const std::string& path() const { return path_; }
  // Leaves no room.
  void Fill();
  void Free();

 private:
  const std::string path_;
  bool mounted_ = false;
};

}  // namespace gradwire::testing_support
