int main() { return 0; }  // a program or library needs a source; see Gradwire.cmake
